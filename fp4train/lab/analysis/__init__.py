"""Analysis of run directories, and what all figures share.

history    metrics as series over steps, recipes and events; which runs compare
figure     colours, style, limits; a figure as PNG and as inline SVG
curves     figures over steps: one run, several runs
heatmap    quantisation errors by layer and step
compare    several runs side by side
"""

"""Parts that model families share: attention, rotary positions, norm, loss. Import them from their
files.
"""

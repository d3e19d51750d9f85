"""Models in and out: the folders of other software, which are written without building a model and
without any other framework; and what a trained model says: text, and its losses on tasks.
"""

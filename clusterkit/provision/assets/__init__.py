"""Models and data sets on the cluster's shared storage: what a run needs, what is there, and how it gets there.

Each is a folder, /storage/models/NAME or /storage/datasets/NAME, with the manifest that `clusterkit assets` writes too
(every file's size and SHA-256). The head node gets it, once; the others only have to see it.
"""

"""Models and data sets on the cluster's shared storage: which ones a run needs, and how they get there.

Each is a folder, /storage/models/NAME or /storage/datasets/NAME, with the manifest that `clusterkit assets` writes too
(every file's size and SHA-256). The head node gets it once; the other hosts only have to see it.
"""

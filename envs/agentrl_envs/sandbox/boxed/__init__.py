"""What runs on the other side of the channel: the keeper that opens boxes, and the agent inside each.

Standard library only, no name of the package outside this folder, and little to import: it is loaded by a bare
interpreter with an empty environment, whose start is most of what a first box costs.
"""

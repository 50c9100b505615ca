"""Operations of the model that have several implementations, equal in values but not in speed.

The model starts with those of torch: in attention.py, block.py and cross_entropy.py. The entries of
model/room.py name all, and plan/tuning/kernels.py measures which are fastest.
"""

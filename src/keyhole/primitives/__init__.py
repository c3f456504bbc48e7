"""What the operations mean: plain definitions, slow and obvious, that every other way is held
to.
"""

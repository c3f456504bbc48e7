"""Figures and tables from the records of runs, set beside the paper's numbers.

`results` reads what `keyhole sweep` wrote, `tables` and `page` put it into words, `figures` draws
it. Only the drawing modules import matplotlib.
"""

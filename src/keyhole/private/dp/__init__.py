"""Differential privacy: what a released model may tell about one client, and what it has told.

`clipping.py` bounds what a client adds, `gaussian.py` hides it in noise on all rows, `adafest.py`
on a noisily chosen set of them, `correlated.py` in noise that rounds take back from each other, for
clients that `participation.py` lets come. `loss.py` says what rounds cost, `withholding.py` what a
sum tells by not being opened, `accounting.py` adds that up for a run, `calibration.py` finds the
noise for a budget, `audit.py` tries to catch them lying.
"""

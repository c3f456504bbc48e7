"""Parts of `devices.py`."""

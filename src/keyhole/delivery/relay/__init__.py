"""Oblivious HTTP: who asks and what is asked are known to different parties."""

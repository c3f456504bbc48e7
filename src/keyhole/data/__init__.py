"""Client datasets: readers of known files, data made on the spot, splits."""

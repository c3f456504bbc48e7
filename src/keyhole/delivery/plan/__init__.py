"""The plan of a delivery: what each way would cost, from public numbers, and which one to use."""

"""Where cohorts run beyond this process: Ray and Flower."""

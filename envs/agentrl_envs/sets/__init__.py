"""One file per data set: its origin, licence, files and sums, and how the origin's form becomes ours."""

"""Data sets, one file each; packages that read files are imported only when a data set is built."""

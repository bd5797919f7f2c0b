"""The kernels between two steps of the book, each with one change more."""

"""Models in torch: the float64 reference, GPUs, encoders, towers of images, and types without a forward in C++."""

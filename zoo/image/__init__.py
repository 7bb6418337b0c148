"""Models of images, with their objectives and samplers."""

"""Images: imported, their trees as layers over commits, and the images that rows name."""

"""Times on a GPU: kernels against the bytes they move, serving against stock SGLang."""

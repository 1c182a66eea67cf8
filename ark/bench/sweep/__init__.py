"""What a torch user meets, op by op, in many shapes: the cases of `ark bench ops "sweep-*"`."""

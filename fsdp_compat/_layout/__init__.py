"""Where every element lies: integers and shapes, without process groups, modules or devices."""

"""How fast is Tidegate, against its peers and the machine's own limits? Run as modules."""

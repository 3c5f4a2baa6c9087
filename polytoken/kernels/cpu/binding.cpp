// The part of nanobind that is compiled into an extension; with the same version as MLX's own module they share objects.
#include <nb_combined.cpp>

#include "threads.h"

EXPORT void megatoken_set_threads(Index n) { pool().set_threads(n); }

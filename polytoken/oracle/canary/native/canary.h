/* The canary's entry point: submit a trivial job to the device, wait for it, and say how long it took.
 *
 * seconds[0]: until the job was scheduled; seconds[1]: until it was done. Returns 1 for success, 0 for failure.
 * Any library with this function can be named with --canary-library. */
#ifndef POLYTOKEN_CANARY_H
#define POLYTOKEN_CANARY_H

#ifdef __cplusplus
extern "C" {
#endif

int ds4_gpu_canary_probe(double seconds[2]);

#ifdef __cplusplus
}
#endif

#endif

/* Which forms this machine can run, and the one in use. */
#include <string.h>

#include "products.h"

static const form *chosen;

static int runs_here(const form *f)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (f == &form_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (f == &form_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    (void)f;
    return 1;
}

static const form *const best_first[] = {
#if defined(__x86_64__)
    &form_avx512,
    &form_avx2,
#elif defined(__aarch64__)
    &form_neon,
#endif
    &form_portable,
};

const form *forms_at(size_t index)
{
    for (size_t i = 0; i < sizeof best_first / sizeof *best_first; i++)
        if (runs_here(best_first[i]) && index-- == 0)
            return best_first[i];
    return NULL;
}

size_t forms_count(void)
{
    size_t count = 0;
    while (forms_at(count))
        count++;
    return count;
}

const form *forms_current(void)
{
    const form *now = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
    if (!now) {
        now = forms_at(0);
        __atomic_store_n(&chosen, now, __ATOMIC_RELEASE);
    }
    return now;
}

int forms_choose(const char *name)
{
    for (size_t i = 0; i < forms_count(); i++)
        if (strcmp(forms_at(i)->name, name) == 0) {
            __atomic_store_n(&chosen, forms_at(i), __ATOMIC_RELEASE);
            return 1;
        }
    return 0;
}

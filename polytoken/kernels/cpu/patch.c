/* Redirects import slots of a library that is already loaded.
 *
 * Every imported function has a slot in its importer's memory that the dynamic linker filled at load time; calls go
 * through it. Writing another address there sends that one library's calls elsewhere and touches nothing else in the
 * process. The tables that name the slots are read from memory, so neither the file nor its sections are needed. */
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "products.h"

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#else
enum { JUMP_SLOT = -1, GLOB_DAT = -1 };
#endif

enum { MOST_SLOTS = 64 };

const char *const patch_names[PATCH_SYMBOLS] = {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"};

typedef struct {
    void **where;
    void *original;
    int symbol;
    int read_only; /* in a segment or range that the linker made read-only */
} slot;

static slot slots[MOST_SLOTS];
static size_t slot_count; /* what patch_install changed; 0 when nothing is redirected */

typedef struct {
    const char *file;
    slot found[MOST_SLOTS];
    size_t count;
    int libraries, too_many;
} search;

static int read_only(const struct dl_phdr_info *info, uintptr_t address)
{
    int writable = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + h->p_vaddr, to = from + h->p_memsz;
        if (h->p_type == PT_LOAD && address >= from && address < to)
            writable = (h->p_flags & PF_W) != 0;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        /* the linker protects whole pages: the start rounded down, the end rounded down */
        uintptr_t from = (info->dlpi_addr + h->p_vaddr) & -page, to = (info->dlpi_addr + h->p_vaddr + h->p_memsz) & -page;
        if (h->p_type == PT_GNU_RELRO && address >= from && address < to)
            writable = 0;
    }
    return !writable;
}

static void read_table(search *s, const struct dl_phdr_info *info, const ElfW(Rela) *table, size_t bytes,
                       const ElfW(Sym) *symbols, const char *strings)
{
    for (size_t i = 0; table && i < bytes / sizeof *table; i++) {
        int type = (int)ELF64_R_TYPE(table[i].r_info);
        if (type != JUMP_SLOT && type != GLOB_DAT)
            continue;
        const char *name = strings + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
        for (int n = 0; n < PATCH_SYMBOLS; n++) {
            if (strcmp(name, patch_names[n]) != 0)
                continue;
            if (s->count == MOST_SLOTS) {
                s->too_many = 1;
                return;
            }
            void **where = (void **)(info->dlpi_addr + table[i].r_offset);
            s->found[s->count++] = (slot){where, *where, n, read_only(info, (uintptr_t)where)};
        }
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    search *s = data;
    const char *base = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    base = base ? base + 1 : info->dlpi_name;
    if (!base || strcmp(base, s->file) != 0)
        return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!dynamic)
        return 0;
    s->libraries++;
    uintptr_t at[4] = {0}; /* symbols, strings, plt relocations, other relocations */
    size_t plt_bytes = 0, rela_bytes = 0;
    int plt_is_rela = 1;
    for (; dynamic->d_tag != DT_NULL; dynamic++)
        switch (dynamic->d_tag) {
        case DT_SYMTAB: at[0] = dynamic->d_un.d_ptr; break;
        case DT_STRTAB: at[1] = dynamic->d_un.d_ptr; break;
        case DT_JMPREL: at[2] = dynamic->d_un.d_ptr; break;
        case DT_RELA: at[3] = dynamic->d_un.d_ptr; break;
        case DT_PLTRELSZ: plt_bytes = dynamic->d_un.d_val; break;
        case DT_RELASZ: rela_bytes = dynamic->d_un.d_val; break;
        case DT_PLTREL: plt_is_rela = dynamic->d_un.d_val == DT_RELA; break;
        default: break;
        }
    /* Some linkers leave these relative to the load address. */
    for (int i = 0; i < 4; i++)
        if (at[i] && at[i] < info->dlpi_addr)
            at[i] += info->dlpi_addr;
    if (!at[0] || !at[1])
        return 0;
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)at[0];
    const char *strings = (const char *)at[1];
    if (plt_is_rela)
        read_table(s, info, (const ElfW(Rela) *)at[2], plt_bytes, symbols, strings);
    read_table(s, info, (const ElfW(Rela) *)at[3], rela_bytes, symbols, strings);
    return 0;
}

static int write_slot(const slot *s, void *value)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)s->where & -page;
    if (s->read_only && mprotect((void *)start, page, PROT_READ | PROT_WRITE) != 0)
        return 0;
    __atomic_store_n(s->where, value, __ATOMIC_RELEASE);
    if (s->read_only)
        mprotect((void *)start, page, PROT_READ);
    return 1;
}

const char *patch_restore(void)
{
    while (slot_count > 0) {
        if (!write_slot(&slots[slot_count - 1], slots[slot_count - 1].original))
            return "an import slot could not be made writable again";
        slot_count--;
    }
    return NULL;
}

const char *patch_install(const char *file, void *const targets[PATCH_SYMBOLS], int redirected[PATCH_SYMBOLS])
{
    const char *why = patch_restore();
    memset(redirected, 0, sizeof(int) * PATCH_SYMBOLS);
    if (why)
        return why;
    static search s;
    memset(&s, 0, sizeof s);
    s.file = file;
    dl_iterate_phdr(visit, &s);
    if (s.libraries == 0)
        return "MLX's library is not loaded";
    if (s.too_many)
        return "MLX's library has more import slots for these symbols than expected";
    if (s.count == 0)
        return "MLX's library imports none of the symbols";
    for (size_t i = 0; i < s.count; i++) {
        if (!write_slot(&s.found[i], targets[s.found[i].symbol])) {
            patch_restore();
            memset(redirected, 0, sizeof(int) * PATCH_SYMBOLS);
            return "an import slot is read-only and could not be made writable";
        }
        slots[slot_count++] = s.found[i];
        redirected[s.found[i].symbol]++;
    }
    return NULL;
}

#include "system/system.h"

#include <stdint.h>

#include <algorithm>
#include <thread>

#if defined(_WIN32)
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <libkern/OSCacheControl.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace sparsepack {

#if defined(_WIN32)
void* map_pages(size_t bytes) noexcept {
    return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void unmap_pages(void* pages, size_t) noexcept { VirtualFree(pages, 0, MEM_RELEASE); }

void advise_huge_pages(void*, size_t) noexcept {}  // they need a right that users do not have

bool give_back(const void*, size_t) noexcept { return false; }  // Windows drops pages of files by itself

long process() noexcept { return 0; }
#else
void* map_pages(size_t bytes) noexcept {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? nullptr : pages;
}

void unmap_pages(void* pages, size_t bytes) noexcept { munmap(pages, bytes); }

void advise_huge_pages([[maybe_unused]] void* pages, [[maybe_unused]] size_t bytes) noexcept {
#ifdef MADV_HUGEPAGE
    madvise(pages, bytes, MADV_HUGEPAGE);
#endif
}

// Whether [start, end) lies in files mapped for reading only. Dropping other pages would lose what was written there.
static bool read_only_file(uintptr_t start, uintptr_t end) noexcept {
    FILE* maps = fopen("/proc/self/maps", "r");
    if (!maps) return false;
    char* line = nullptr;
    size_t room = 0;
    while (start < end && getline(&line, &room, maps) > 0) {
        uint64_t from, to, offset, inode;
        unsigned major, minor;
        char rights[5];
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &from, &to, rights, &offset, &major,
                   &minor, &inode) != 7)
            break;
        if (to <= start) continue;
        if (from > start || rights[0] != 'r' || rights[1] != '-' || !inode) break;
        start = to;
    }
    free(line);
    fclose(maps);
    return start >= end;
}

bool give_back(const void* data, size_t bytes) noexcept {
    uintptr_t page = sysconf(_SC_PAGESIZE), first = reinterpret_cast<uintptr_t>(data);
    uintptr_t start = (first + page - 1) & ~(page - 1), end = (first + bytes) & ~(page - 1);
    if (start >= end || !read_only_file(start, end)) return false;
    return madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED) == 0;
}

long process() noexcept { return getpid(); }
#endif

int usable_processors() noexcept {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1, int(std::thread::hardware_concurrency()));
}

void flush_caches(const void* data, size_t bytes) noexcept {
#if defined(__APPLE__)
    sys_dcache_flush(const_cast<void*>(data), bytes);
#else
    constexpr size_t LINE = 64;
    auto first = reinterpret_cast<uintptr_t>(data) & ~(LINE - 1), end = reinterpret_cast<uintptr_t>(data) + bytes;
    for (uintptr_t line = first; line < end; line += LINE) {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_clflush(reinterpret_cast<const void*>(line));
#elif defined(__aarch64__)
        __asm__ __volatile__("dc civac, %0" : : "r"(line) : "memory");
#endif
    }
#if defined(__x86_64__) || defined(_M_X64)
    _mm_mfence();
#elif defined(__aarch64__)
    __asm__ __volatile__("dsb ish" : : : "memory");
#endif
#endif
}

bool allow_tiles() noexcept {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long REQUEST_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
#else
    return false;
#endif
}

void pause() noexcept {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

}  // namespace sparsepack

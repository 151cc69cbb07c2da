#include "memory/memory.h"

#include <new>
#include <utility>

#ifdef _WIN32
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

namespace sparsepack {

static constexpr size_t HUGE_PAGE = 2 << 20;

#ifdef _WIN32
// Huge pages need a right that users do not have.
static void* map_pages(size_t bytes) { return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

static void unmap_pages(void* pages, size_t) { VirtualFree(pages, 0, MEM_RELEASE); }

static void advise_huge_pages(void*, size_t) {}
#else
static void* map_pages(size_t bytes) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? nullptr : pages;
}

static void unmap_pages(void* pages, size_t bytes) { munmap(pages, bytes); }

// A wish: without huge pages all works, slower.
static void advise_huge_pages([[maybe_unused]] void* pages, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(pages, bytes, MADV_HUGEPAGE);
#endif
}
#endif

Memory::Memory(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
    bool huge = bytes >= HUGE_PAGE;
    mapped_ = bytes + (huge ? HUGE_PAGE : 0);
    mapping_ = map_pages(mapped_);
    if (!mapping_) throw std::bad_alloc();
    uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
    if (huge) start = (start + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    data_ = reinterpret_cast<uint8_t*>(start);
    if (huge) advise_huge_pages(data_, bytes);
}

Memory::~Memory() {
    if (mapping_) unmap_pages(mapping_, mapped_);
}

void Memory::swap(Memory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
}

#ifdef _WIN32
bool give_back(const void*, size_t) { return false; }  // Windows drops pages of files by itself
#else
// Whether [start, end) lies in files mapped for reading only. Dropping other pages would lose what was written there.
static bool read_only_file(uintptr_t start, uintptr_t end) {
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

bool give_back(const void* data, size_t bytes) {
    uintptr_t page = sysconf(_SC_PAGESIZE), first = reinterpret_cast<uintptr_t>(data);
    uintptr_t start = (first + page - 1) & ~(page - 1), end = (first + bytes) & ~(page - 1);
    if (start >= end || !read_only_file(start, end)) return false;
    return madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED) == 0;
}
#endif

}  // namespace sparsepack

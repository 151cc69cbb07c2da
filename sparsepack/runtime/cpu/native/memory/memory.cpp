#include "memory/memory.h"

#include "system/system.h"

#include <new>
#include <utility>

namespace sparsepack {

Memory::Memory(size_t bytes, Pages pages) : bytes_(bytes) {
    if (!bytes) return;
    bool huge = pages == Pages::LARGE && bytes >= HUGE_PAGE;
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

}  // namespace sparsepack

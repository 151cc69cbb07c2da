// Memory for matrices.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace sparsepack {

// LARGE: a matrix needs a few entries of the processor's page table cache instead of thousands. SMALL: what is filled bit by bit
// in many places, as a KV cache is, would be there as a whole with the first token.
enum class Pages { LARGE, SMALL };

// Anonymous memory, zero at first, in huge pages where these shall be and there are 2 MiB and more. Freed with its owner.
class Memory {
public:
    Memory() = default;
    explicit Memory(size_t bytes, Pages pages = Pages::LARGE);  // throws std::bad_alloc
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory();

    uint8_t* data() const noexcept { return data_; }  // at least 64-byte aligned
    size_t bytes() const noexcept { return bytes_; }

private:
    void swap(Memory& other) noexcept;

    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
    void* mapping_ = nullptr;
    size_t mapped_ = 0;
};

}  // namespace sparsepack

// Scratch memory of a thread or a phase.
#pragma once
#include <stddef.h>

#include <memory>
#include <new>

namespace sparsepack {

// An array of plain values, zero at first, on cache lines of its own: what one thread writes never slows another.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t size) : data_(static_cast<T*>(::operator new(bytes(size), LINE))), size_(size) {
        for (size_t i = 0; i < size; ++i) data_[i] = T();
    }

    // Room for at least `size`; what was in it is lost where it grows.
    void grow(size_t size) {
        if (size > size_) *this = Buffer(size);
    }

    T* data() const noexcept { return data_.get(); }
    size_t size() const noexcept { return size_; }

private:
    static constexpr std::align_val_t LINE{64};
    static size_t bytes(size_t size) { return (size * sizeof(T) + 127) / 64 * 64; }
    struct Free {
        void operator()(T* data) const noexcept { ::operator delete(data, LINE); }
    };

    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;
};

}  // namespace sparsepack

// Memory of CPU tensors, aligned within blocks of malloc.
//
// PyTorch's own asks for aligned blocks by posix_memalign, whose requests in glibc before 2.38 are
// larger than what such a block leaves when it is freed: the next of its size does not fit there.
#include <c10/core/Allocator.h>

#include <cstdint>
#include <cstdlib>
#include <new>

static constexpr size_t ALIGNMENT = 64;  // bytes: vectors of the CPU, and PyTorch's own choice

// The block of malloc is written in front of the memory, where there are 16 bytes at least.
static void release(void* memory) {
    if (memory) free(static_cast<void**>(memory)[-1]);
}

struct TightAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const c10::Device cpu(c10::DeviceType::CPU);
        if (!bytes) return {nullptr, nullptr, &release, cpu};
        if (bytes > SIZE_MAX - ALIGNMENT) throw std::bad_alloc();
        void* block = malloc(bytes + ALIGNMENT);
        if (!block) throw std::bad_alloc();
        uintptr_t place = (reinterpret_cast<uintptr_t>(block) + ALIGNMENT) & ~(ALIGNMENT - 1);
        void** memory = reinterpret_cast<void**>(place);
        memory[-1] = block;
        return {memory, memory, &release, cpu};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }
};

extern "C" void install() {
    static TightAllocator allocator;
    c10::SetAllocator(c10::DeviceType::CPU, &allocator, 1);
}

// A device that torch takes for an Apple GPU. It has no memory and no kernels, which fake tensors do not need.
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::Stream;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> {
    Device getDevice() const override { return Device(c10::DeviceType::MPS, 0); }
    Device exchangeDevice(Device) const override { return getDevice(); }
    Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
    Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
    Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
};
C10_REGISTER_GUARD_IMPL(MPS, Guard)

struct MPSHooks final : at::MPSHooksInterface {
    MPSHooks(at::MPSHooksArgs = {}) {}
    bool hasMPS() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
namespace at {
REGISTER_MPS_HOOKS(MPSHooks)
}

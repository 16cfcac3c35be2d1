// The device guard and the hooks of a GPU that is not there: every call does nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::Stream;

struct Guard : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device own() const { return Device(c10::DeviceType::CUDA, 0); }
  Device getDevice() const override { return own(); }
  Device exchangeDevice(Device) const override { return own(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, own()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, own()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, own()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, own()); }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
// Called after torch is imported: the last guard counts, and torch's builds for CUDA bring their own.
extern "C" void put_guard() {
  static const c10::impl::DeviceGuardImplRegistrar put(c10::DeviceType::CUDA, new Guard());
}

struct Hooks : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
namespace at {
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// Preferred to those of a build for CUDA, which it registers later: two of one rank end the process.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}

// The few functions of the CUDA driver that torch calls without launching a kernel.

#define API extern "C" __attribute__((visibility("default")))

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuDeviceGet(int* device, int number) { return *device = number, 0; }
API int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
API int cuCtxGetCurrent(void** context) {
  static int only_context;
  *context = &only_context;
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuGetErrorString(int, const char** text) { return *text = "an error of fakecuda", 0; }

//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// session is an initialised NVML with what does not change while it is.
type session struct {
	lib    nvml.Interface
	path   string // of the library's file; empty where there is none to watch (tests)
	has    map[string]bool
	host   gpu.Host
	events nvml.EventSet // nil where the driver has none
}

// library opens sessions with one shared library.
type library struct {
	name  string
	bound os.FileInfo // the file that this process is bound to since the first session; nil before
}

func openLibrary(name string) func() (*session, error) {
	l := &library{name: name}
	return l.open
}

// open probes the library and opens it for go-nvml only once it is known to start.
func (l *library) open() (*session, error) {
	p, err := openProbe(l.name)
	if err != nil {
		return nil, l.replaced(err)
	}
	defer p.shutdown()
	info, err := os.Stat(p.path)
	if err != nil {
		return nil, removedError(p.path)
	}
	// go-nvml gets the path that the loader found: a bare name could find another file by now.
	lib := nvml.New(nvml.WithLibraryPath(p.path))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return nil, &initError{path: p.path, code: codeName(int(ret))}
	}
	if l.bound == nil {
		l.bound = info
	}
	s, err := newSession(lib)
	if err != nil {
		return nil, err
	}
	s.path = p.path
	return s, nil
}

// replaced marks the error where the file on disk is no longer the one that this process is bound to.
func (l *library) replaced(err error) error {
	var ie *initError
	if l.bound == nil || !errors.As(err, &ie) {
		return err
	}
	if info, statErr := os.Stat(ie.path); statErr == nil && !os.SameFile(info, l.bound) {
		ie.replaced = true
	}
	return ie
}

func removedError(path string) error {
	return fmt.Errorf("the NVIDIA driver library %s was removed from this host", path)
}

// newSession reads what a session needs from an initialised library, which it shuts down again on failure.
func newSession(lib nvml.Interface) (*session, error) {
	s := &session{lib: lib, has: map[string]bool{}}
	for _, symbol := range usedSymbols() {
		s.has[symbol] = lib.Extensions().LookupSymbol(symbol) == nil
	}
	if err := s.required(); err != nil {
		s.shutdown()
		return nil, err
	}
	if s.has["nvmlSystemGetDriverVersion"] {
		if v, ret := lib.SystemGetDriverVersion(); ret == nvml.SUCCESS {
			s.host.DriverVersion = v
		}
	}
	if s.has["nvmlSystemGetCudaDriverVersion"] {
		if v, ret := lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
			s.host.CUDAVersion = fmt.Sprintf("%d.%d", v/1000, v%1000/10) // 12040 is 12.4: nvml.h, NVML_CUDA_DRIVER_VERSION_MAJOR
		}
	}
	if s.hasAll("nvmlEventSetCreate", "nvmlEventSetFree", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes") &&
		s.hasAny("nvmlEventSetWait_v2", "nvmlEventSetWait") {
		if set, ret := lib.EventSetCreate(); ret == nvml.SUCCESS {
			s.events = set
		}
	}
	return s, nil
}

// usedSymbols are all that this package may call. A call to a symbol that the library lacks ends the process.
func usedSymbols() []string {
	return []string{
		"nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetCount_v2",
		"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID",
		"nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo_v3",
		"nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
		"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId",
		"nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage",
		"nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2",
		"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v3",
		"nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetFieldValues",
		"nvmlEventSetCreate", "nvmlEventSetFree", "nvmlEventSetWait_v2", "nvmlEventSetWait", "nvmlDeviceRegisterEvents",
		"nvmlDeviceGetSupportedEventTypes",
	}
}

// required names the first of the symbols without which there is nothing to report.
func (s *session) required() error {
	for _, names := range [][]string{
		{"nvmlShutdown"},
		{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
		{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
		{"nvmlDeviceGetUUID"},
		{"nvmlDeviceGetName"},
	} {
		if !s.hasAny(names...) {
			return fmt.Errorf("the NVIDIA driver library lacks %s: the driver is too old", strings.Join(names, " and "))
		}
	}
	return nil
}

func (s *session) hasAll(symbols ...string) bool {
	for _, name := range symbols {
		if !s.has[name] {
			return false
		}
	}
	return true
}

func (s *session) hasAny(symbols ...string) bool {
	for _, name := range symbols {
		if s.has[name] {
			return true
		}
	}
	return false
}

// removed reports whether the library's file has gone. What is mapped would work on, but the files that containers get
// are those on disk.
func (s *session) removed() bool {
	if s.path == "" {
		return false
	}
	_, err := os.Stat(s.path)
	return errors.Is(err, os.ErrNotExist)
}

// shutdown gives NVML back. No call may be open. What it returns changes nothing for us: the session is over.
func (s *session) shutdown() {
	if s.events != nil {
		_ = s.events.Free()
	}
	if s.has["nvmlShutdown"] {
		_ = s.lib.Shutdown()
	}
}

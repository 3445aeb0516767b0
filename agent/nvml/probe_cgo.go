//go:build cgo && linux

package nvml

/*
#cgo LDFLAGS: -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>

static int call(void *f) { return ((int (*)(void))f)(); }

static const char *path_of(void *handle) {
	struct link_map *map = NULL;
	return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "";
}
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// probe opens the library by itself and initialises NVML in it. It has two uses. The loader's own words say why a library
// cannot be opened, which go-nvml drops. And go-nvml calls through the process's symbol table: the first library that it
// calls stays in the process for ever, so a library that fails to initialise must be closed again before go-nvml has seen
// it, or no other one could ever take its place.
type probe struct {
	handle unsafe.Pointer
	path   string // of the file that the loader found
}

// openProbe returns an open probe with NVML initialised once, or the reason why that cannot be.
func openProbe(library string) (*probe, error) {
	runtime.LockOSThread() // dlerror is the thread's
	defer runtime.UnlockOSThread()
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	handle := C.dlopen(name, C.RTLD_LAZY|C.RTLD_LOCAL)
	if handle == nil {
		return nil, fmt.Errorf("no NVIDIA driver library: %w", loaderError())
	}
	p := &probe{handle: handle, path: C.GoString(C.path_of(handle))}
	start := p.symbol("nvmlInit_v2")
	if start == nil {
		start = p.symbol("nvmlInit")
	}
	if start == nil {
		p.close()
		return nil, fmt.Errorf("%s is no NVML library: it has no nvmlInit", p.path)
	}
	if ret := C.call(start); ret != 0 {
		p.close()
		return nil, &initError{path: p.path, code: codeName(int(ret))}
	}
	return p, nil
}

func loaderError() error {
	if msg := C.dlerror(); msg != nil {
		return errors.New(C.GoString(msg))
	}
	return errors.New("the loader gives no reason")
}

func (p *probe) symbol(name string) unsafe.Pointer {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	return C.dlsym(p.handle, s)
}

func (p *probe) close() { C.dlclose(p.handle) }

// shutdown undoes the probe's own initialisation, once go-nvml holds one, and closes.
func (p *probe) shutdown() {
	if f := p.symbol("nvmlShutdown"); f != nil {
		C.call(f)
	}
	p.close()
}

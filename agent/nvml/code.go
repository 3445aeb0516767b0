package nvml

import (
	"fmt"
	"strings"
)

// codeName is NVML's name of a return code without NVML_ERROR_, as nvml.h declares it. go-nvml's own names call into the
// library, which may lack that call or be the one that fails.
func codeName(code int) string {
	names := map[int]string{
		0: "SUCCESS", 1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION",
		5: "ALREADY_INITIALIZED", 6: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", 8: "INSUFFICIENT_POWER", 9: "DRIVER_NOT_LOADED",
		10: "TIMEOUT", 11: "IRQ_ISSUE", 12: "LIBRARY_NOT_FOUND", 13: "FUNCTION_NOT_FOUND", 14: "CORRUPTED_INFOROM",
		15: "GPU_IS_LOST", 16: "RESET_REQUIRED", 17: "OPERATING_SYSTEM", 18: "LIB_RM_VERSION_MISMATCH", 19: "IN_USE",
		20: "MEMORY", 21: "NO_DATA", 22: "VGPU_ECC_NOT_SUPPORTED", 23: "INSUFFICIENT_RESOURCES", 24: "FREQ_NOT_SUPPORTED",
		25: "ARGUMENT_VERSION_MISMATCH", 26: "DEPRECATED", 27: "NOT_READY", 28: "GPU_NOT_FOUND", 29: "INVALID_STATE",
		30: "RESET_TYPE_NOT_SUPPORTED", 999: "UNKNOWN",
	}
	if name, ok := names[code]; ok {
		return name
	}
	return fmt.Sprintf("code %d", code)
}

// initError is a library that is there and does not initialise.
type initError struct {
	path, code string
	replaced   bool // the file on disk is another than the one this process holds
}

func (e *initError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "NVML does not start: %s (%s)", e.code, e.path)
	switch {
	case e.replaced:
		b.WriteString("; the library was replaced while the agent ran: restart the agent")
	case e.code == "DRIVER_NOT_LOADED":
		b.WriteString("; load the kernel module nvidia")
	case e.code == "LIB_RM_VERSION_MISMATCH":
		b.WriteString("; library and kernel module are of different driver versions: reload the module or restart the host")
	}
	return b.String()
}

// RestartNeeded reports whether only another process can go on.
func (e *initError) RestartNeeded() bool { return e.replaced }

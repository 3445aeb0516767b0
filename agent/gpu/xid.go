package gpu

// XIDClass says what an XID means for the device.
type XIDClass int

// The classes.
const (
	// XIDApplication is a fault of the program that ran, or a note: the device stays in use.
	XIDApplication XIDClass = iota
	// XIDDevice is a fault of the device: it is taken out until it has proved itself.
	XIDDevice
	// XIDUnknown is neither in the table: the device stays in use, unless the driver asks for a recovery action or stops
	// answering. An unknown number alone must not take a device out for ever.
	XIDUnknown
)

// ClassifyXID returns the class of an XID. The application class is what NVIDIA's k8s-device-plugin ignores
// (internal/rm/health.go: 13, 31, 43, 45, 68, 109) and others that end a program or are a note; the device class is what
// asks for a reset, a restart of the host or service. Descriptions:
// https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
func ClassifyXID(xid int) XIDClass {
	switch xid {
	case 8, // GPU stopped processing: channel idle timeout
		13,  // graphics engine exception
		31,  // memory page fault
		32,  // corrupted push buffer
		37,  // driver error from the program's input
		43,  // GPU stopped processing: channel reset
		45,  // preemptive cleanup after an earlier error
		68,  // video processor exception
		63,  // row remapping or page retirement recorded
		69,  // graphics engine class error
		92,  // high rate of corrected single-bit errors
		94,  // contained memory error: the program ended, others go on
		109, // context switch timeout
		137, // NVLink fault of a program
		154: // recovery action changed: the recovery action itself is read at each inventory
		return XIDApplication
	case 46, // GPU stopped processing, reset asked for
		48,     // double-bit ECC error
		61, 62, // internal micro-controller breakpoint, halt
		64,       // row remapping or page retirement failed
		74,       // NVLink error
		79,       // GPU has fallen off the bus
		95,       // uncontained memory error
		119, 120, // GSP timeout, GSP error
		140, // unrecovered ECC error
		143: // GPU initialisation error
		return XIDDevice
	}
	return XIDUnknown
}

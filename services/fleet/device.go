package fleet

import "time"

// DeviceID is the driver's UUID, or `SIM-...` for a simulated device; never an index.
type DeviceID string

// DeviceKind says what a device is.
type DeviceKind string

// The kinds of device.
const (
	KindGPU       DeviceKind = "gpu"
	KindMIG       DeviceKind = "mig"
	KindMIGParent DeviceKind = "mig_parent" // only its instances can be leased
)

// HealthOK is the health of a device that can be leased; any other word says why it cannot.
const HealthOK = "ok"

// Device is what can be leased, or a GPU that cannot be now.
type Device struct {
	ID                DeviceID
	Host              HostID
	Index             int // as the driver counts today, for the eye only
	Product           string
	Model             string // what `--gpu` takes
	MemoryMiB         int64
	ComputeCapability string
	PCIBusID          string
	Kind              DeviceKind
	Parent            DeviceID
	Simulated         bool
	Present           bool // in the host's last inventory
	Health            string
	HealthReason      string
	Excluded          bool
	ExcludedReason    string
}

// Leasable reports whether the device could be leased if nobody held it, and if not why.
func (d *Device) Leasable() (ok bool, reason string) {
	switch {
	case d.Excluded:
		return false, "excluded: " + d.ExcludedReason
	case !d.Present:
		return false, "lost: no longer in the host's inventory"
	case d.Kind == KindMIGParent:
		return false, "in MIG mode: nothing runs on the whole of it"
	case d.Health != HealthOK:
		return false, d.Health + ": " + d.HealthReason
	}
	return true, ""
}

// Offered reports whether the scheduler may give the device out, and if not why. MIG instances can be leased, but are not given out yet.
func (d *Device) Offered() (ok bool, reason string) {
	if ok, reason := d.Leasable(); !ok {
		return ok, reason
	}
	if d.Kind == KindMIG {
		return false, "a MIG instance: shown, but not given out yet"
	}
	return true, ""
}

// Process is a program that has a device open.
type Process struct {
	PID       int64
	Name      string
	MemoryMiB *int64
	Graphics  bool
	Run       RunKey // zero when it is not ours
}

// Sample is one measurement of one device; nil fields are not supported by it.
type Sample struct {
	Device             DeviceID
	At                 time.Time // gateway time
	UtilizationPercent *int
	MemoryUsedMiB      *int64
	PowerWatts         *float64
	TemperatureCelsius *int
	Processes          []Process
	Stale              bool
}

// ActiveUtilizationPercent is the utilisation from which a sample counts as active. NVML's figure is the share of the last sample
// period in which at least one kernel ran (nvmlUtilization_t.gpu), so that 1 already means that something computed.
const ActiveUtilizationPercent = 1

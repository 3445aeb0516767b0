package gpu

import "time"

// MetricState says how far a metric's value can be trusted.
type MetricState string

// The states of a metric.
const (
	Fresh       MetricState = "ok"
	Stale       MetricState = "stale"         // the last good value, At says from when
	Unsupported MetricState = "not_supported" // this device never reports it
	Missing     MetricState = "n/a"           // it failed and there is no recent value
)

// Metric is one reading. "Not supported" is data, so it is a state and no error.
type Metric struct {
	Value  float64 // unit by the field that holds it; 0 unless Fresh or Stale
	State  MetricState
	At     time.Time // when Value was read; zero without one
	Reason string    // why it is stale or missing, "GPU_IS_LOST"
}

// Known reports whether Value means something.
func (m Metric) Known() bool { return m.State == Fresh || m.State == Stale }

// FreshMetric is a value read at the given time.
func FreshMetric(value float64, at time.Time) Metric {
	return Metric{Value: value, State: Fresh, At: at}
}

// MissingMetric is a reading that failed for the given reason.
func MissingMetric(reason string) Metric { return Metric{State: Missing, Reason: reason} }

// UnsupportedMetric is a reading that the device does not offer.
func UnsupportedMetric() Metric { return Metric{State: Unsupported} }

// ProcessType says how a process uses the device.
type ProcessType string

// The process types. A process in the driver's compute and graphics lists alike counts as compute.
const (
	Compute  ProcessType = "compute"
	Graphics ProcessType = "graphics"
)

// MemoryUnknown stands for a process's memory where the driver does not say.
const MemoryUnknown = int64(-1)

// Process is a process that has the device open, by its pid on the host.
type Process struct {
	PID       int
	Name      string // empty where unknown
	MemoryMiB int64  // MemoryUnknown where unknown
	Type      ProcessType
	Workspace string // the workspace that it runs in; empty for none
}

// Fault is an XID that the driver reported for a device.
type Fault struct {
	UUID string // of the GPU, or of the MIG instance where the driver says which
	XID  int
	At   time.Time
}

// Sample is what one device was doing at one moment.
type Sample struct {
	UUID           string
	At             time.Time // when it was read
	UtilisationPct Metric    // 0..100, share of the driver's last period (1/6 to 1 s) in which a kernel ran
	MemoryUsedMiB  Metric
	PowerW         Metric
	TemperatureC   Metric
	Processes      []Process
	ProcessesState MetricState // Fresh, Stale, Unsupported or Missing
	Faults         []Fault     // since the sample before; each is reported once
	Simulated      bool
}

// FailedSample is the sample of a device that gave no answer.
func FailedSample(uuid, reason string, at time.Time) Sample {
	m := MissingMetric(reason)
	return Sample{
		UUID: uuid, At: at, UtilisationPct: m, MemoryUsedMiB: m, PowerW: m, TemperatureC: m, ProcessesState: Missing,
	}
}

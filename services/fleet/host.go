package fleet

import "time"

// HostID is opaque.
type HostID string

// Host is a machine with an agent.
type Host struct {
	ID                HostID
	Name              string
	Pool              string
	PublicKey         []byte // ed25519
	Session           int64  // grows at every connection
	Generation        int64  // grows at every change of its desired state
	AfterSeq          int64  // highest observation committed
	JournalID         string
	BootID            string
	Draining          bool
	Fenced            bool
	Connected         bool      // now, in this gateway's memory
	LastSeen          time.Time // zero: never
	AgentVersion      string
	EngineVersion     string
	OS                string
	CPUs              int
	MemoryMiB         int64
	ReservedCPUMillis int64
	ReservedMemoryMiB int64
	DiskFreeMiB       int64
	GPUSource         string
	DriverVersion     string
	CUDAVersion       string
	Problems          []string
	Unmanaged         []Unmanaged
	ClockSkew         time.Duration // host minus gateway
	JoinedAt          time.Time
}

// Unmanaged is a container on a host that holds our labels or names, but that nobody here asked for.
type Unmanaged struct {
	Name    string
	Run     RunKey // zero unless its labels' signature holds
	Devices []DeviceID
	Running bool
}

// HostFacts is what an agent says of its host.
type HostFacts struct {
	BootID, AgentVersion, EngineVersion, OS string
	CPUs                                    int
	MemoryMiB, DiskFreeMiB                  int64
	ReservedCPUMillis, ReservedMemoryMiB    int64
	GPUSource, DriverVersion, CUDAVersion   string
	Devices                                 []Device
	Problems                                []string
	Unmanaged                               []Unmanaged
	ClockSkew                               time.Duration
}

// Observation is a batch from one host, times already on the gateway's time line.
type Observation struct {
	Host           HostID
	Session        int64
	JournalID      string
	Seq            int64 // reached by this batch
	Facts          *HostFacts
	Runs           []ObservedRun
	Complete       bool // all that was there at the call has been sent
	VolumesRemoved []VolumeID
}

// Stamp orders what a gateway sends to a host.
type Stamp struct {
	DatabaseGeneration int64
	HostSession        int64
	Generation         int64
}

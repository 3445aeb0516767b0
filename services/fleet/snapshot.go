package fleet

import "time"

// Snapshot is all that a scheduling decision may rest on.
type Snapshot struct {
	Hosts        []HostView
	Waiting      []Request // in order of first submission
	Held         map[UserID]int
	Reservations []Reservation
}

// HostView is a host as the scheduler sees it.
type HostView struct {
	ID              HostID
	Name            string
	Pool            string
	Usable          bool   // connected, not draining, not fenced, engine answers
	Why             string // when it is not usable
	CPUMillis       int64  // offered in all, reserve kept
	MemoryMiB       int64
	DiskFreeMiB     int64
	FreeCPUMillis   int64
	FreeMemoryMiB   int64
	CUDAVersion     string
	DriverVersion   string
	GPUSource       string
	Devices         []DeviceView
	CPUOnlyReserve  int64 // thousandths of a core kept for runs without devices
	MemOnlyReserve  int64 // MiB kept for them
	FreeCPUOnly     int64
	FreeMemoryOnly  int64
	LeasableDevices int
}

// DeviceView is a device as the scheduler sees it.
type DeviceView struct {
	ID                DeviceID
	Model             string
	MemoryMiB         int64
	ComputeCapability string
	Leasable          bool
	Why               string // when it is not leasable
	Free              bool   // leasable, not leased, not named by an unmanaged container
	HeldBy            string // owner/name
	NoShare           bool   // takes no share of its host's CPU and memory: no longer in the inventory, or split into parts that do
}

// Request is a run that waits for a place.
type Request struct {
	Run         RunKey
	Name        string
	User        UserID
	UserName    string
	GPULimit    int // most devices of the user at once; negative: none
	Spec        Spec
	SubmittedAt time.Time // of the first submission of this run
	HomeHost    HostID    // a local volume lies there; empty: anywhere
	HomeVolume  string    // its name, for the reason
	KeepDevices []DeviceID
	KeepHost    HostID // set on restart: the devices of the run before are handed over
	BusyVolume  string // a volume that another live workspace writes; names that workspace
}

// Placement gives a waiting run a host, devices and sizes.
type Placement struct {
	Run       RunKey
	Host      HostID
	Devices   []DeviceID
	CPUMillis int64
	MemoryMiB int64
	ShmMiB    int64
	PidsLimit int64
	Origins   map[string]string // where each size came from
}

// Wait says why a run does not start now.
type Wait struct {
	Run    RunKey
	Place  int // 1 is next
	Length int
	Why    string
}

// Reservation keeps devices free for a run that has waited long.
type Reservation struct {
	Run     RunKey
	Host    HostID
	Devices []DeviceID
	Since   time.Time
}

// Refusal says why a run can never start as things are.
type Refusal struct {
	Run RunKey
	Err error
}

// Plan is a decision with its reasons.
type Plan struct {
	Placements   []Placement
	Waits        []Wait
	Reservations []Reservation
	Refusals     []Refusal
}

package fleet

// Pool is a set of hosts under one set of rules.
type Pool struct {
	Name                string
	Description         string
	DefaultImage        string
	Sudo                bool
	Default             bool
	MaxGPUsPerWorkspace int   // 0: no limit
	DefaultCPUMillis    int64 // 0: the host's share per device
	DefaultMemoryMiB    int64 // 0: the host's share per device
}

package gpu

import (
	"context"
	"slices"
)

// Owner says whose a process is.
type Owner struct {
	Name      string // the process's name; empty where unknown
	Workspace string // empty for none
	Ours      bool   // it runs in a container of ours
}

// OwnerOf finds the owner of a process by its pid on the host. It is called once per process and question, so it may read
// /proc and must not block.
type OwnerOf func(pid int) Owner

// Proc reads what the kernel says about a process.
type Proc interface {
	// Cgroup returns the content of /proc/<pid>/cgroup.
	Cgroup(pid int) ([]byte, error)
	// Name returns the process's name, at most 15 bytes (/proc/<pid>/comm).
	Name(pid int) (string, error)
}

// OwnersByContainer finds a process's owner by the container it runs in. workspaceOf knows the containers of ours by their
// full id. A process that can no longer be read is nobody's: while the driver lists it, it holds the device.
func OwnersByContainer(proc Proc, workspaceOf func(containerID string) (workspace string, ok bool)) OwnerOf {
	return func(pid int) Owner {
		var owner Owner
		if name, err := proc.Name(pid); err == nil {
			owner.Name = name
		}
		cgroup, err := proc.Cgroup(pid)
		if err != nil {
			return owner
		}
		for _, id := range ContainerIDs(cgroup) {
			if workspace, ok := workspaceOf(id); ok {
				owner.Workspace, owner.Ours = workspace, true
				return owner
			}
		}
		return owner
	}
}

// Owned names the processes of inventory and samples, and lists on each device the compute processes that are not ours.
func Owned(src Source, ownerOf OwnerOf) Source { return &owned{Source: src, ownerOf: ownerOf} }

type owned struct {
	Source
	ownerOf OwnerOf
}

func (o *owned) Inventory(ctx context.Context) (Inventory, error) {
	inv, err := o.Source.Inventory(ctx)
	if err != nil {
		return Inventory{}, err
	}
	inv = inv.clone()
	for i := range inv.Devices {
		d := &inv.Devices[i]
		if d.Simulated {
			continue
		}
		d.Processes, d.ForeignProcesses = o.name(d.Processes)
	}
	return inv, nil
}

func (o *owned) Sample(ctx context.Context) ([]Sample, error) {
	samples, err := o.Source.Sample(ctx)
	if err != nil {
		return nil, err
	}
	for i := range samples {
		if !samples[i].Simulated {
			samples[i].Processes, _ = o.name(samples[i].Processes)
		}
	}
	return samples, nil
}

func (o *owned) name(processes []Process) (named, foreign []Process) {
	named = slices.Clone(processes)
	for i := range named {
		p := &named[i]
		owner := o.ownerOf(p.PID)
		p.Name, p.Workspace = owner.Name, owner.Workspace
		if !owner.Ours && p.Type == Compute {
			foreign = append(foreign, *p)
		}
	}
	return named, foreign
}

// Rule is what an admin said about a device.
type Rule int

// The rules.
const (
	RuleNone    Rule = iota // nothing was said
	RuleExclude             // never give it out
	RuleInclude             // give it out although processes outside Carrel use it
)

// Ruled marks devices by an admin's rules; a MIG instance takes its parent's exclusion too.
func Ruled(src Source, ruleOf func(uuid string) Rule) Source {
	return &ruled{Source: src, ruleOf: ruleOf}
}

type ruled struct {
	Source
	ruleOf func(uuid string) Rule
}

func (r *ruled) Inventory(ctx context.Context) (Inventory, error) {
	inv, err := r.Source.Inventory(ctx)
	if err != nil {
		return Inventory{}, err
	}
	inv = inv.clone()
	for i := range inv.Devices {
		d := &inv.Devices[i]
		rule := r.ruleOf(d.UUID)
		d.Excluded = rule == RuleExclude || d.Parent != "" && r.ruleOf(d.Parent) == RuleExclude
		d.ForeignAllowed = rule == RuleInclude
	}
	return inv, nil
}

package host

import (
	"slices"
	"time"
)

// Record is what the journal keeps about a run.
type Record struct {
	Key           Key       `json:"key"`
	Seq           int64     `json:"seq"` // of the last change
	Phase         Phase     `json:"phase"`
	ContainerID   string    `json:"container_id,omitempty"`
	EngineStarted time.Time `json:"engine_started,omitzero"` // as the engine words it: tells one start from another
	Started       Moment    `json:"started,omitzero"`
	Ready         Moment    `json:"ready,omitzero"`
	LastSeen      Moment    `json:"last_seen,omitzero"` // last moment at which it was seen to run
	Ended         Moment    `json:"ended,omitzero"`
	Unattested    bool      `json:"unattested,omitempty"` // nobody saw the end
	ExitCode      *int      `json:"exit_code,omitempty"`
	OutOfMemory   bool      `json:"out_of_memory,omitempty"`
	Doomed        bool      `json:"doomed,omitempty"` // it must end whatever the gateway wants; Reason says why
	Reason        Reason    `json:"reason,omitzero"`
	LogTail       []string  `json:"log_tail,omitempty"`
	Sudo          string    `json:"sudo,omitempty"`
	ImageDigest   string    `json:"image_digest,omitempty"`
	Devices       []Grant   `json:"devices,omitempty"`
	Volumes       []string  `json:"volumes,omitempty"` // those it writes

	pullDone, pullTotal int64
	silent              bool // the engine gives no answer
}

// live reports whether a container of it may be there.
func (r *Record) live() bool { return r.Phase != PhaseGone && r.ContainerID != "" }

// running reports whether, as far as is known, it runs.
func (r *Record) running() bool { return r.live() && !r.Started.IsZero() && r.Ended.IsZero() }

// end notes an end once: a later report of an end never moves it.
func (r *Record) end(at Moment, attested bool, code *int) {
	if r.Ended.IsZero() {
		r.Ended, r.Unattested, r.ExitCode = at, !attested, code
		return
	}
	if r.ExitCode == nil {
		r.ExitCode = code
	}
}

// explain gives the reason of an end, unless one is known already.
func (r *Record) explain(reason Reason) {
	if r.Reason.Code == "" || r.Reason.passing() {
		r.Reason = reason
	}
}

// passing reports whether a reason tells of something that is over when the run goes on.
func (r Reason) passing() bool {
	switch r.Code {
	case ReasonMemoryInside, ReasonConflict, ReasonDeviceBusy, ReasonHostFault:
		return true
	}
	return false
}

func (r *Record) clone() Record {
	c := *r
	c.LogTail, c.Devices, c.Volumes = slices.Clone(r.LogTail), slices.Clone(r.Devices), slices.Clone(r.Volumes)
	return c
}

func (r *Record) observed(now Moment, silentSince Moment) Observed {
	o := Observed{
		Key: r.Key, Seq: r.Seq, Phase: r.Phase, ContainerID: r.ContainerID,
		StartedAge: age(now, r.Started), ReadyAge: age(now, r.Ready), EndedAge: age(now, r.Ended),
		EndedUnattested: r.Unattested, ExitCode: r.ExitCode, OutOfMemory: r.OutOfMemory,
		Reason: r.Reason, LogTail: slices.Clone(r.LogTail), PullDone: r.pullDone, PullTotal: r.pullTotal,
		Sudo: r.Sudo, ImageDigest: r.ImageDigest,
	}
	if r.Phase != PhaseGone && !silentSince.IsZero() {
		o.EngineSilent = age(now, silentSince)
	}
	return o
}

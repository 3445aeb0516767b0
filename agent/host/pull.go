package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// puller fetches each image once, for all runs that wait for it. A run that no longer waits leaves the others their pull.
type puller struct {
	images Images
	stall  time.Duration // longest time without any progress

	mu    sync.Mutex
	pulls map[string]*pull
	wg    sync.WaitGroup
}

// pull is one fetch and those who wait for it.
type pull struct {
	cancel  context.CancelFunc
	waiters int
	done    chan struct{} // closed after err is set
	err     error

	mu       sync.Mutex
	progress PullProgress
	moved    chan struct{} // closed and replaced with each progress
}

func newPuller(images Images, stall time.Duration) *puller {
	return &puller{images: images, stall: stall, pulls: map[string]*pull{}}
}

// fetch pulls ref unless somebody does already, and waits for the end or for ctx. The fetch itself lives as long as base
// and while somebody waits.
func (p *puller) fetch(base, ctx context.Context, ref string, each func(PullProgress)) error {
	pl := p.join(base, ref)
	defer p.leave(ref, pl)
	for {
		pl.mu.Lock()
		progress, moved := pl.progress, pl.moved
		pl.mu.Unlock()
		each(progress)
		select {
		case <-pl.done:
			return pl.err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-moved:
		}
	}
}

func (p *puller) join(base context.Context, ref string) *pull {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pl := p.pulls[ref]; pl != nil {
		pl.waiters++
		return pl
	}
	ctx, cancel := context.WithCancel(base)
	pl := &pull{cancel: cancel, waiters: 1, done: make(chan struct{}), moved: make(chan struct{})}
	p.pulls[ref] = pl
	p.wg.Go(func() {
		defer cancel()
		pl.err = p.run(ctx, ref, pl)
		p.mu.Lock()
		if p.pulls[ref] == pl {
			delete(p.pulls, ref)
		}
		p.mu.Unlock()
		close(pl.done)
	})
	return pl
}

func (p *puller) leave(ref string, pl *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pl.waiters--
	if pl.waiters == 0 {
		pl.cancel()
		if p.pulls[ref] == pl {
			delete(p.pulls, ref) // whoever comes now begins anew
		}
	}
}

// errStalled ends a pull that makes no progress.
var errStalled = errors.New("no progress")

// run pulls and watches that something goes on, be it slow.
func (p *puller) run(ctx context.Context, ref string, pl *pull) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	last := time.Now()
	watch := time.AfterFunc(p.stall, func() { cancel(errStalled) })
	defer watch.Stop()
	moment := ""
	err := p.images.Pull(ctx, ref, func(pr PullProgress) {
		if pr.Moment != moment {
			moment, last = pr.Moment, time.Now()
			watch.Reset(p.stall)
		}
		pl.mu.Lock()
		pl.progress = pr
		close(pl.moved)
		pl.moved = make(chan struct{})
		pl.mu.Unlock()
	})
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return Errorf(KindStalled, "no progress since %s (limit %s)", last.UTC().Format(time.RFC3339), p.stall)
	}
	return err
}

// wait returns when no fetch goes on.
func (p *puller) wait() { p.wg.Wait() }

// repository is a reference without tag and digest.
func repository(ref string) string {
	ref, _, _ = strings.Cut(ref, "@")
	if i := strings.LastIndexByte(ref, ':'); i > strings.LastIndexByte(ref, '/') {
		ref = ref[:i]
	}
	return ref
}

// present finds the image that must run in the engine: by its registry digest, or by the engine's own id. A tag is never
// asked for, since it may have moved.
func (h *Host) present(ctx context.Context, d *Desired) (Image, error) {
	if !strings.HasPrefix(d.ImageReference, "sha256:") {
		image, err := h.runtime.Image(ctx, repository(d.ImageReference)+"@"+d.ImageDigest)
		if KindOf(err) != KindNotFound {
			return image, err
		}
	}
	return h.runtime.Image(ctx, d.ImageDigest)
}

// fetchFailed turns a failed pull into a reason, or into nothing where another try is due.
func fetchFailed(d *Desired, err error) (Reason, bool) {
	name := d.ImageReference
	switch KindOf(err) {
	case KindUnavailable:
		return Reason{}, false
	case KindNotFound:
		return Reason{ReasonImageNotFound, fmt.Sprintf("image %s (%s) is neither in its registry nor on this host: %v", name, d.ImageDigest, err)}, true
	case KindDenied:
		return Reason{ReasonPullFailed, fmt.Sprintf("the registry did not let this host have image %s: %v", name, err)}, true
	case KindNoSpace:
		return Reason{ReasonDiskFull, fmt.Sprintf("the disk of this host has no room for image %s; an admin must make room, then start again: %v", name, err)}, true
	case KindStalled:
		return Reason{ReasonPullFailed, fmt.Sprintf("pull of image %s: %v; start again, or look at the registry", name, err)}, true
	default:
	}
	return Reason{ReasonPullFailed, fmt.Sprintf("pull of image %s failed: %v; start again to retry", name, err)}, true
}

package lifecycle

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// begin is where a host session starts to observe.
type begin struct {
	session int64
	after   int64
	journal string
}

// link is a host that has dialled in.
type link struct {
	host    fleet.HostID
	session int64
	apply   chan struct{} // one place: desired state is to be sent
	cancel  context.CancelFunc
	done    chan struct{} // closed when its loops have ended; nil until they were started
	gone    bool          // the link is lost
	refused string        // why the host does not take its desired state; guarded by Lifecycle.mu
}

// ended reports whether no loop of the link, or of the one before it, runs any more.
func (k *link) ended() bool {
	if k.done == nil {
		return true
	}
	select {
	case <-k.done:
		return true
	default:
		return false
	}
}

// BeginSession begins a new session of a host that has proved itself; the number goes into the host's link. Call it before HostUp.
func (l *Lifecycle) BeginSession(ctx context.Context, host fleet.HostID) (int64, error) {
	session, after, journal, err := l.store.BeginSession(ctx, host, l.now())
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sessions[host].session < session {
		l.sessions[host] = begin{session, after, journal}
	}
	return session, nil
}

// HostUp tells that a host's link is up in a session from BeginSession. A later link takes the place of an earlier one.
func (l *Lifecycle) HostUp(host fleet.HostID, session int64) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.links[host]; old != nil && old.cancel != nil {
		old.cancel()
	}
	var before chan struct{}
	if old := l.links[host]; old != nil {
		before = old.done
	}
	l.links[host] = &link{host: host, session: session, apply: make(chan struct{}, 1), done: before}
	l.heard[host] = now
	close(l.linked)
	l.linked = make(chan struct{})
	poke(l.relink)
}

// HostDown tells that the link of a session is lost. Leases are kept: no answer is never read as "not running".
func (l *Lifecycle) HostDown(host fleet.HostID, session int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if link := l.links[host]; link != nil && link.session == session {
		link.gone = true
		if link.cancel != nil {
			link.cancel()
		}
		poke(l.relink)
		poke(l.wake)
	}
}

// Connected reports whether a host answers now.
func (l *Lifecycle) Connected(host fleet.HostID) bool {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	link := l.links[host]
	return link != nil && !link.gone && now.Sub(l.heard[host]) < l.set.SilentAfter
}

// UnreachableSince returns since when a host has not answered; zero while it does.
func (l *Lifecycle) UnreachableSince(host fleet.HostID) time.Time {
	if l.Connected(host) {
		return time.Time{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if at := l.heard[host]; !at.IsZero() {
		return at
	}
	return l.begun
}

// serveLinks runs the loops of each link, one set per host at a time, until ctx ends.
func (l *Lifecycle) serveLinks(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	tick := time.NewTicker(l.set.Tick)
	defer tick.Stop()
	silent := map[fleet.HostID]bool{}
	for {
		l.startLinks(ctx, &group)
		l.noteSilence(silent)
		select {
		case <-ctx.Done():
			return
		case <-l.relink:
		case <-tick.C:
		}
	}
}

// startLinks starts the loops of links that have none yet, and forgets those that are gone.
func (l *Lifecycle) startLinks(ctx context.Context, group *sync.WaitGroup) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for host, link := range l.links {
		if link.gone {
			l.dropPulls(host)
			if link.ended() {
				delete(l.links, host)
			}
			continue
		}
		if link.cancel != nil {
			continue
		}
		linkCtx, cancel := context.WithCancel(ctx)
		before, done := link.done, make(chan struct{})
		link.cancel, link.done = cancel, done
		from := l.sessions[host]
		group.Go(func() {
			defer poke(l.relink)
			defer close(done)
			defer cancel()
			if before != nil {
				<-before // two sets of loops never serve one host
			}
			l.serveLink(linkCtx, link, from)
		})
	}
}

// noteSilence tells watchers, and plans again, when a host fell silent or spoke again.
func (l *Lifecycle) noteSilence(silent map[fleet.HostID]bool) {
	l.mu.Lock()
	hosts := make([]fleet.HostID, 0, len(l.heard))
	for host := range l.heard {
		hosts = append(hosts, host)
	}
	l.mu.Unlock()
	for _, host := range hosts {
		if now := !l.Connected(host); silent[host] != now {
			silent[host] = now
			l.events.HostChanged(host)
			l.Replan()
		}
	}
}

// serveLink runs the loops of one link until it is lost.
func (l *Lifecycle) serveLink(ctx context.Context, link *link, from begin) {
	for pause := time.Duration(0); from.session < link.session; { // the caller began the session elsewhere
		session, after, journal, err := l.store.BeginSession(ctx, link.host, l.now())
		if err == nil {
			from = begin{session, after, journal}
			break
		}
		if ctx.Err() != nil {
			return
		}
		pause = l.backOff(pause)
		l.log.Error("host session not begun", "host", link.host, "error", err, "retry_in", pause)
		wait(ctx, jitter(pause))
	}
	l.log.Info("host session begins", "host", link.host, "session", from.session, "after_seq", from.after)
	poke(link.apply)
	var group sync.WaitGroup
	group.Go(func() { l.applyLoop(ctx, link) })
	group.Go(func() { l.observeLoop(ctx, link, from) })
	group.Go(func() { l.sampleLoop(ctx, link) })
	group.Wait()
	l.log.Info("host session ended", "host", link.host, "session", from.session)
}

// applyLoop sends the host its desired state until it has the newest one, after each change and now and then without one.
func (l *Lifecycle) applyLoop(ctx context.Context, link *link) {
	reapply := time.NewTicker(l.set.Reapply)
	defer reapply.Stop()
	for pause := time.Duration(0); ; {
		var retry <-chan time.Time
		if pause > 0 {
			retry = time.After(jitter(pause))
		}
		select {
		case <-ctx.Done():
			return
		case <-link.apply:
		case <-reapply.C:
		case <-retry:
		}
		err := l.applyOnce(ctx, link)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			pause = 0
			l.refusedBy(link, nil)
		default:
			pause = l.backOff(pause)
			l.refusedBy(link, err)
			l.log.Warn("desired state not taken by host", "host", link.host, "error", err, "retry_in", pause)
		}
	}
}

// refusedBy notes that a host does not take its desired state although it answers, such as one that has served a newer database; nil
// when it does.
func (l *Lifecycle) refusedBy(link *link, err error) {
	text := ""
	if fleet.IsKind(err, fleet.KindConflict) {
		text = fleet.UserMessage(err)
	}
	l.mu.Lock()
	changed := link.refused != text
	link.refused = text
	l.mu.Unlock()
	if changed {
		l.Replan()
		l.events.HostChanged(link.host)
	}
}

// Trouble says why a host that answers does not take orders of this gateway; empty when it does.
func (l *Lifecycle) Trouble(host fleet.HostID) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if link := l.links[host]; link != nil {
		return link.refused
	}
	return ""
}

// takesOrders reports whether a host answers and does what it is told, so that a run may be placed there.
func (l *Lifecycle) takesOrders(host fleet.HostID) bool {
	return l.Connected(host) && l.Trouble(host) == ""
}

func (l *Lifecycle) applyOnce(ctx context.Context, link *link) error {
	desired, err := l.store.Desired(ctx, link.host)
	if err != nil {
		return err
	}
	users := map[fleet.UserID]bool{}
	for _, r := range desired.Runs {
		users[r.Owner.ID] = true
	}
	l.mu.Lock()
	l.users[link.host] = users
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, l.set.ApplyTimeout)
	defer cancel()
	if err := l.hosts.Apply(ctx, desired); err != nil {
		return err
	}
	l.spoke(ctx, link)
	return nil
}

// observeLoop takes in what the host reports. The next call acknowledges only what has been committed.
func (l *Lifecycle) observeLoop(ctx context.Context, link *link, from begin) {
	seen := time.Time{}
	for pause := time.Duration(0); ctx.Err() == nil; {
		err := l.hosts.Observe(ctx, link.host, from.after, func(o fleet.Observation) error {
			if err := l.takeIn(ctx, link, &from, o); err != nil {
				return err
			}
			pause = 0
			if now := l.now(); now.Sub(seen) >= l.set.SeenInterval {
				seen = now
				return l.store.Seen(ctx, link.host, now)
			}
			return nil
		})
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			l.spoke(ctx, link)
			pause = 0
			continue
		case errors.Is(err, errOtherJournal):
			continue
		}
		pause = l.backOff(pause)
		l.log.Warn("observing a host failed", "host", link.host, "error", err, "retry_in", pause)
		wait(ctx, jitter(pause))
	}
}

// errOtherJournal ends a stream whose host began a new journal: what it skipped by the old journal's number must be asked for again.
var errOtherJournal = errors.New("the host has another journal")

// takeIn commits one batch.
func (l *Lifecycle) takeIn(ctx context.Context, link *link, from *begin, o fleet.Observation) error {
	l.spoke(ctx, link)
	if o.JournalID != from.journal {
		skipped := from.after != 0
		from.journal, from.after = o.JournalID, 0
		if skipped {
			return errOtherJournal
		}
	}
	select { // so many hosts that come back at once do not crowd out everybody else's writes
	case l.turns <- struct{}{}:
		defer func() { <-l.turns }()
	case <-ctx.Done():
		return ctx.Err()
	}
	o.Host, o.Session = link.host, max(from.session, o.Session)
	if err := l.Observe(ctx, o); err != nil {
		return err
	}
	from.after = max(from.after, o.Seq)
	return nil
}

// Observe records a batch from a host, decides what it makes of workspaces, and sees to what follows from it.
func (l *Lifecycle) Observe(ctx context.Context, o fleet.Observation) error {
	changes, err := l.store.Observe(ctx, o, l.now(), decide)
	if err != nil {
		return err
	}
	if changes.Stale {
		l.log.Info("late report ignored", "host", o.Host, "session", o.Session, "seq", o.Seq)
		return nil
	}
	for _, key := range changes.Unknown {
		l.log.Warn("host reports a run that is not known here; it is left alone", "host", o.Host, "workspace", key.Workspace, "epoch", key.Epoch)
	}
	pulling := l.keepPulls(o)
	l.after(ctx, changes)
	l.changed(ctx, pulling...)
	if o.Facts != nil {
		l.events.HostChanged(o.Host)
		l.events.DevicesChanged()
		l.Replan()
	}
	return nil
}

// keepPulls remembers pull progress for views, and returns the workspaces whose progress changed.
func (l *Lifecycle) keepPulls(o fleet.Observation) []fleet.WorkspaceID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var told []fleet.WorkspaceID
	for _, r := range o.Runs {
		id := r.Key.Workspace
		if r.Phase == fleet.PhasePulling {
			l.pulls[id] = pull{r.Key, o.Host, fleet.Pull{Done: r.PullDone, Total: r.PullTotal}}
			told = append(told, id)
		} else if l.pulls[id].run.Epoch <= r.Key.Epoch {
			delete(l.pulls, id)
		}
	}
	return told
}

func (l *Lifecycle) dropPulls(host fleet.HostID) { // l.mu is held
	for id, p := range l.pulls {
		if p.host == host {
			delete(l.pulls, id)
		}
	}
}

// sampleLoop polls measurements. A lost sample changes no bill, so it is not made up for.
func (l *Lifecycle) sampleLoop(ctx context.Context, link *link) {
	tick := time.NewTicker(l.set.SampleInterval)
	defer tick.Stop()
	for {
		if err := l.sampleOnce(ctx, link); err != nil && ctx.Err() == nil {
			l.log.Debug("no sample of host", "host", link.host, "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (l *Lifecycle) sampleOnce(ctx context.Context, link *link) error {
	ctx, cancel := context.WithTimeout(ctx, l.set.SampleTimeout)
	defer cancel()
	samples, err := l.hosts.Sample(ctx, link.host)
	if err != nil {
		return err
	}
	l.spoke(ctx, link)
	l.mu.Lock()
	for _, s := range samples {
		l.samples[s.Device] = s
	}
	l.mu.Unlock()
	if len(samples) == 0 {
		return nil
	}
	l.events.DevicesChanged()
	return l.store.RecordSamples(ctx, link.host, samples, l.set.SampleInterval, l.now())
}

// spoke notes a word of the host, by the gateway's own clock.
func (l *Lifecycle) spoke(ctx context.Context, link *link) {
	if ctx.Err() != nil {
		return
	}
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.heard[link.host]) >= l.set.SilentAfter {
		poke(l.relink)
	}
	l.heard[link.host] = now
}

// jitter spreads a pause by a quarter to both sides, so that hosts do not come back in step.
func jitter(d time.Duration) time.Duration {
	return d*3/4 + rand.N(d/2+1)
}

// wait pauses, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

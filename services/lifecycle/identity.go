package lifecycle

import (
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Keys makes and opens host keys; their purpose is the workspace's id.
type Keys interface {
	// NewHostKey makes a host key and returns it sealed.
	NewHostKey(purpose string) (sealed []byte, err error)
	// HostIdentity opens a host key and signs it for one principal: an OpenSSH private key file and a certificate that lasts 30 days.
	HostIdentity(sealed []byte, purpose, principal string, now time.Time) (key []byte, certificate string, err error)
}

// certificateAge is when a host certificate is made anew: less than 10 of its 30 days are left (DESIGN D10).
const certificateAge = 20 * 24 * time.Hour

// Identities gives workspaces their SSH host identities, and remembers them so that a host is not told a new one at every call.
type Identities struct {
	keys Keys
	now  func() time.Time

	mu   sync.Mutex
	made map[fleet.WorkspaceID]identity
}

type identity struct {
	key         []byte
	certificate string
	at          time.Time
}

// NewIdentities returns an empty memory of identities.
func NewIdentities(keys Keys, now func() time.Time) *Identities {
	return &Identities{keys: keys, now: now, made: map[fleet.WorkspaceID]identity{}}
}

// SSHIdentity returns a workspace's host key as an OpenSSH private key file, and its certificate, renewed in time.
func (i *Identities) SSHIdentity(w fleet.Workspace) (hostKey []byte, certificate string, err error) {
	now := i.now()
	i.mu.Lock()
	known, ok := i.made[w.ID]
	i.mu.Unlock()
	if ok && now.Sub(known.at) < certificateAge {
		return known.key, known.certificate, nil
	}
	key, certificate, err := i.keys.HostIdentity(w.HostKey, string(w.ID), w.SSHPrincipal(), now)
	if err != nil {
		return nil, "", err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for id, old := range i.made { // those of workspaces that are gone age out
		if now.Sub(old.at) >= certificateAge {
			delete(i.made, id)
		}
	}
	i.made[w.ID] = identity{key: key, certificate: certificate, at: now}
	return key, certificate, nil
}

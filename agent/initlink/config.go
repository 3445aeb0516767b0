package initlink

import (
	"time"

	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
)

// Config is what a run is, as carrel-init needs it.
type Config struct {
	Login  string
	UID    int64
	GID    int64
	Groups []Group // beside GID
	Home   string  // absolute
	Sudo   bool
	// HostKey is an OpenSSH private key file in PEM form. Secret.
	HostKey []byte
	// HostCertificate and AuthorizedKeys are in authorized_keys form, keys without options.
	HostCertificate string
	AuthorizedKeys  []string
	// Env is for every session, over the image's ENV.
	Env      map[string]string
	Hostname string
}

// Group is a POSIX group.
type Group struct {
	Name string
	GID  int64
}

// Found is what carrel-init found when it was configured.
type Found struct {
	InitVersion string
	Sudo        string // `yes`, `no: pool` or `no: image has no sudo`
	Shell       string // empty when the image has none
}

// Status of a run's link.
type Status struct {
	Connected bool
	Ready     bool   // the newest configuration is in force
	Refused   string // why carrel-init refused it; empty when it did not
	Found     Found
}

// Activity inside a run.
type Activity struct {
	SSHSessions int
	TypedAgo    time.Duration // since something was typed; negative when nothing ever was
}

func (c Config) request(version int64) *agentv1.ConfigureRequest {
	req := &agentv1.ConfigureRequest{
		Version:  version,
		Identity: &agentv1.Identity{Login: c.Login, Uid: c.UID, Gid: c.GID},
		Home:     c.Home, Sudo: c.Sudo, Env: c.Env, Hostname: c.Hostname,
		Ssh: &agentv1.SshIdentity{HostKey: c.HostKey, HostCertificate: c.HostCertificate, AuthorizedKeys: c.AuthorizedKeys},
	}
	for _, g := range c.Groups {
		req.Identity.Groups = append(req.Identity.Groups, &agentv1.Group{Name: g.Name, Gid: g.GID})
	}
	return req
}

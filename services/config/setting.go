// Package config reads the gateway's settings: defaults, file, environment and flags, in that order, strict, with all faults reported together.
package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// EnvPrefix begins the name of each environment variable: `tls.cert_file` is CARREL_GATEWAY_TLS_CERT_FILE.
const EnvPrefix = "CARREL_GATEWAY_"

// kind is the type of a setting's value.
type kind uint8

const (
	kindString kind = iota
	kindBool
	kindInt
	kindDuration
	kindStrings
	kindMounts
)

var kindWords = [...]string{"text", "true or false", "a whole number", "a duration such as 10s", "a list of texts", "a list of mounts"}

// setting is one row of the table: its key, type, default and what it is for.
type setting struct {
	key   string
	kind  kind
	def   any
	doc   string
	check func(value any) error
}

// settings is the whole table, in the order of `config print`.
func settings() []setting {
	return []setting{
		{key: "listen", def: "127.0.0.1:7070", doc: "address and port of the one public port", check: hostPort},
		{key: "public_url", def: "", doc: "base URL as clients reach it; empty: made from listen", check: optionalURL},
		{key: "hosts", kind: kindStrings, def: []string{}, doc: "more names and addresses by which clients may call the public port, such as those of a proxy before it", check: hostNames},
		{key: "state", def: "", doc: "directory of database and keys; empty: /var/lib/carrel as root, else ~/.local/state/carrel"},
		{key: "deployment", def: "carrel", doc: "name of the deployment, part of ssh host names for a second one", check: deploymentName},
		{key: "metrics_listen", def: "", doc: "address of the Prometheus listener; empty: none", check: optionalHostPort},
		{key: "cli_dir", def: "", doc: "directory of the CLI binaries to serve; empty: `cli` beside carreld"},
		{key: "tls.cert_file", def: "", doc: "certificate chain, PEM; empty: from the own CA"},
		{key: "tls.key_file", def: "", doc: "private key of tls.cert_file, PEM"},
		{key: "tls.names", kind: kindStrings, def: []string{}, doc: "more names and addresses for the own certificate"},
		{key: "dangerous_plain_http", kind: kindBool, def: false, doc: "serve plain HTTP on an address that is not loopback: whoever can read the network can take over accounts"},
		{key: "images.allow", def: "catalogue", doc: "what --image may name: any, registries, or catalogue", check: oneOf("any", "registries", "catalogue")},
		{key: "images.registries", kind: kindStrings, def: []string{}, doc: "registry hosts and repository prefixes for images.allow: registries"},
		{key: "images.default", def: "", doc: "image of `up` when neither user nor pool names one"},
		{key: "mounts", kind: kindMounts, def: []any{}, doc: "host paths that users may mount by name: name, path, read_only, public"},
		{key: "limits.gpus_per_user", kind: kindInt, def: -1, doc: "most devices of one user at once; -1: no limit", check: unlimitedOr(1)},
		{key: "limits.workspaces_per_user", kind: kindInt, def: 50, doc: "most workspaces of one user that are not deleted", check: atLeast(1)},
		{key: "limits.streams_per_user", kind: kindInt, def: 512, doc: "most open byte streams of one user", check: atLeast(1)},
		{key: "scheduler.reserve_after", kind: kindDuration, def: 10 * time.Minute, doc: "wait after which devices are kept free for a request", check: positive},
		{key: "scheduler.tick", kind: kindDuration, def: 5 * time.Second, doc: "longest time between two plans", check: positive},
		{key: "samples.interval", kind: kindDuration, def: 10 * time.Second, doc: "time between two measurements of each device", check: positive},
		{key: "stop.grace", kind: kindDuration, def: 10 * time.Second, doc: "time between the polite and the hard signal", check: positive},
		{key: "token.life", kind: kindDuration, def: 90 * 24 * time.Hour, doc: "how long a sign-in lasts", check: positive},
		{key: "sign_in.life", kind: kindDuration, def: time.Hour, doc: "how long a one-time sign-in can be used", check: positive},
		{key: "join.life", kind: kindDuration, def: time.Hour, doc: "how long a join token can be used", check: positive},
		{key: "ticket.life", kind: kindDuration, def: 30 * time.Second, doc: "how long a stream's ticket can be used", check: positive},
		{key: "link.ping", kind: kindDuration, def: 15 * time.Second, doc: "silence after which a host's connection is asked for a sign of life", check: positive},
		{key: "link.ping_timeout", kind: kindDuration, def: 15 * time.Second, doc: "wait for that sign before the connection is given up", check: positive},
		{key: "stream.write_timeout", kind: kindDuration, def: 30 * time.Second, doc: "time without progress after which a byte stream is given up", check: positive},
		{key: "stream.open_timeout", kind: kindDuration, def: 10 * time.Second, doc: "wait for a host to open a byte stream", check: positive},
		{key: "call.timeout", kind: kindDuration, def: 15 * time.Second, doc: "wait for an answer of a host", check: positive},
		{key: "shutdown.grace", kind: kindDuration, def: 10 * time.Second, doc: "time that open calls get at shutdown", check: positive},
		{key: "database.busy_timeout", kind: kindDuration, def: 5 * time.Second, doc: "wait for a lock of the database", check: positive},
		{key: "log.level", def: "info", doc: "debug, info, warn or error", check: oneOf("debug", "info", "warn", "error")},
		{key: "log.format", def: "text", doc: "text or json", check: oneOf("text", "json")},
	}
}

// env returns the setting's environment variable.
func (s setting) env() string {
	return EnvPrefix + strings.ToUpper(strings.NewReplacer(".", "_").Replace(s.key))
}

// flag returns the setting's flag, without dashes.
func (s setting) flag() string {
	return strings.NewReplacer(".", "-", "_", "-").Replace(s.key)
}

// parse turns a text of the environment or a flag into the setting's type.
func (s setting) parse(text string) (any, error) {
	switch s.kind {
	case kindString:
		return text, nil
	case kindBool:
		return strconv.ParseBool(text)
	case kindInt:
		return strconv.Atoi(text)
	case kindDuration:
		return time.ParseDuration(text)
	case kindStrings:
		return splitList(text), nil
	case kindMounts:
		return nil, fmt.Errorf("mounts are set in the file only")
	}
	return nil, fmt.Errorf("unknown kind")
}

// fromFile turns a value that YAML gave into the setting's type; strict: no number for a text, no text for a number.
func (s setting) fromFile(value any) (any, error) {
	switch s.kind {
	case kindString:
		if text, ok := value.(string); ok {
			return text, nil
		}
	case kindBool:
		if b, ok := value.(bool); ok {
			return b, nil
		}
	case kindInt:
		if n, ok := value.(int); ok {
			return n, nil
		}
	case kindDuration:
		if text, ok := value.(string); ok {
			return time.ParseDuration(text)
		}
	case kindStrings:
		return stringList(value)
	case kindMounts:
		return mountList(value)
	}
	return nil, fmt.Errorf("is %T", value)
}

func splitList(text string) []string {
	list := []string{}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, part)
		}
	}
	return list
}

func stringList(value any) ([]string, error) {
	items, ok := value.([]any)
	if !ok {
		return nil, fmt.Errorf("is %T", value)
	}
	list := make([]string, 0, len(items))
	for _, item := range items {
		text, ok := item.(string)
		if !ok {
			return nil, fmt.Errorf("holds %v, which is %T", item, item)
		}
		list = append(list, text)
	}
	return list, nil
}

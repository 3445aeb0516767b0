package fleet

import "time"

// Image is an entry of the catalogue.
type Image struct {
	Name        string
	Reference   string
	Digest      string // `sha256:...`; empty until resolved
	Host        HostID // set when the digest exists on one host only
	Description string
	Default     bool
	RequireCUDA string
	SizeBytes   int64
	CreatedAt   time.Time
}

// ResolvedImage is what a reference stands for.
type ResolvedImage struct {
	Digest      string
	Present     bool
	LocalOnly   bool
	RequireCUDA string
	Labels      map[string]string
	SizeBytes   int64
}

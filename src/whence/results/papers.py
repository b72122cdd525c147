"""The papers behind the methods, under the names by which the method table cites them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """One paper. `authors`: "Given Family; …", in the paper's order."""

    name: str
    authors: str
    title: str
    venue: str
    url: str

    @property
    def year(self) -> int:
        return int(self.name[-4:])


ARXIV = "https://arxiv.org/abs/"
FERRANDO = "Javier Ferrando; Gerard I. Gállego; "
KOBAYASHI = "Goro Kobayashi; Tatsuki Kuribayashi; Sho Yokoi; Kentaro Inui"

# fmt: off
PAPERS = {paper.name: paper for paper in (
    Paper("Abnar & Zuidema 2020", "Samira Abnar; Willem Zuidema", "Quantifying Attention Flow in Transformers", "ACL",
          ARXIV + "2005.00928"),
    Paper("Bhardwaj et al. 2021", "Rishabh Bhardwaj; Navonil Majumder; Soujanya Poria; Eduard Hovy",
          "More Identifiable yet Equally Performant Transformers for Text Classification", "ACL",
          "https://aclanthology.org/2021.acl-long.94"),
    Paper("Brunner et al. 2020",
          "Gino Brunner; Yang Liu; Damián Pascual; Oliver Richter; Massimiliano Ciaramita; Roger Wattenhofer",
          "On Identifiability in Transformers", "ICLR", ARXIV + "1908.04211"),
    Paper("Chefer et al. 2021", "Hila Chefer; Shir Gur; Lior Wolf",
          "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder Transformers", "ICCV",
          ARXIV + "2103.15679"),
    Paper("DeYoung et al. 2020", "Jay DeYoung; Sarthak Jain; Nazneen Fatema Rajani; Eric Lehman; Caiming Xiong; "
          "Richard Socher; Byron C. Wallace", "ERASER: A Benchmark to Evaluate Rationalized NLP Models", "ACL",
          ARXIV + "1911.03429"),
    Paper("Edin et al. 2024", "Joakim Edin; Andreas Geert Motzfeldt; Casper L. Christensen; Tuukka Ruotsalo; Lars Maaløe; "
          "Maria Maistro", "Normalized AOPC: Fixing Misleading Faithfulness Metrics for Feature Attribution Explainability",
          "arXiv", ARXIV + "2408.08137"),
    Paper("Ferrando et al. 2022", FERRANDO + "Marta R. Costa-jussà",
          "Measuring the Mixing of Contextual Information in the Transformer", "EMNLP", ARXIV + "2203.04212"),
    Paper("Ferrando et al. 2023", FERRANDO + "Ioannis Tsiamas; Marta R. Costa-jussà",
          "Explaining How Transformers Use Context to Build Predictions", "ACL", ARXIV + "2305.12535"),
    Paper("Jain & Wallace 2019", "Sarthak Jain; Byron C. Wallace", "Attention is not Explanation", "NAACL",
          "https://aclanthology.org/N19-1357"),
    Paper("Kobayashi et al. 2020", KOBAYASHI, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
          "EMNLP", ARXIV + "2004.10102"),
    Paper("Kobayashi et al. 2021", KOBAYASHI,
          "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models", "EMNLP",
          ARXIV + "2109.07152"),
    Paper("Lundberg & Lee 2017", "Scott M. Lundberg; Su-In Lee", "A Unified Approach to Interpreting Model Predictions",
          "NeurIPS", ARXIV + "1705.07874"),
    Paper("Modarressi et al. 2022", "Ali Modarressi; Mohsen Fayyaz; Yadollah Yaghoobzadeh; Mohammad Taher Pilehvar",
          "GlobEnc: Quantifying Global Token Attribution by Incorporating the Whole Encoder Layer in Transformers", "NAACL",
          ARXIV + "2205.03286"),
    Paper("Modarressi et al. 2023",
          "Ali Modarressi; Mohsen Fayyaz; Ehsan Aghazadeh; Yadollah Yaghoobzadeh; Mohammad Taher Pilehvar",
          "DecompX: Explaining Transformers Decisions by Propagating Token Decomposition", "ACL", ARXIV + "2306.02873"),
    Paper("Mohebbi et al. 2023", "Hosein Mohebbi; Willem Zuidema; Grzegorz Chrupała; Afra Alishahi",
          "Quantifying Context Mixing in Transformers", "EACL", ARXIV + "2301.12971"),
    Paper("Pascual et al. 2021", "Damián Pascual; Gino Brunner; Roger Wattenhofer",
          "Telling BERT's Full Story: from Local Attention to Global Aggregation", "EACL",
          "https://aclanthology.org/2021.eacl-main.9"),
    Paper("Ribeiro et al. 2016", "Marco Tulio Ribeiro; Sameer Singh; Carlos Guestrin",
          "“Why Should I Trust You?”: Explaining the Predictions of Any Classifier", "KDD", ARXIV + "1602.04938"),
    Paper("Shrikumar et al. 2016", "Avanti Shrikumar; Peyton Greenside; Anna Shcherbina; Anshul Kundaje",
          "Not Just a Black Box: Learning Important Features Through Propagating Activation Differences", "arXiv",
          ARXIV + "1605.01713"),
    Paper("Simonyan et al. 2014", "Karen Simonyan; Andrea Vedaldi; Andrew Zisserman",
          "Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency Maps", "ICLR workshop",
          ARXIV + "1312.6034"),
    Paper("Sun & Marasović 2021", "Kaiser Sun; Ana Marasović", "Effective Attention Sheds Light On Interpretability",
          "Findings of ACL", ARXIV + "2105.08855"),
    Paper("Sundararajan et al. 2017", "Mukund Sundararajan; Ankur Taly; Qiqi Yan",
          "Axiomatic Attribution for Deep Networks", "ICML", ARXIV + "1703.01365"),
    Paper("Vaswani et al. 2017", "Ashish Vaswani; Noam Shazeer; Niki Parmar; Jakob Uszkoreit; Llion Jones; Aidan N. Gomez; "
          "Łukasz Kaiser; Illia Polosukhin", "Attention Is All You Need", "NeurIPS", ARXIV + "1706.03762"),
    Paper("Wiegreffe & Pinter 2019", "Sarah Wiegreffe; Yuval Pinter", "Attention is not not Explanation", "EMNLP",
          ARXIV + "1908.04626"),
    Paper("Zeiler & Fergus 2014", "Matthew D. Zeiler; Rob Fergus", "Visualizing and Understanding Convolutional Networks",
          "ECCV", ARXIV + "1311.2901"),
)}
"""Every paper that the method table cites."""
# fmt: on
